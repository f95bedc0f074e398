"""Data: events → cache → samples → batches."""
