"""The store: facts about a frozen target, written once, read by any number of trainers.

Start with SPEC.md beside this source root, then `writer`, `reader` and `inspection`. This file imports nothing, so
that a command's `--help` stays instant.
"""
