"""From event files to the event cache, out of core: see ``pipeline.prepare`` for the stages."""

from generative_recommenders.data.prepare.engine import Limits
from generative_recommenders.data.prepare.pipeline import prepare
from generative_recommenders.data.prepare.source import AttributeFile, Check, Source
from generative_recommenders.data.prepare.verify import describe, verify

__all__ = ["AttributeFile", "Check", "Limits", "Source", "describe", "prepare", "verify"]
