"""For programs that kill themselves: source text that a test puts in front of what such a program does."""

COUNTED = """
import os, signal
done = 0

def counted(function):
    def wrapper(*arguments, **options):
        global done
        done += 1
        if done == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return wrapper
"""
