"""Measure a draft where it matters: greedy speculative decoding with the real target resident."""
