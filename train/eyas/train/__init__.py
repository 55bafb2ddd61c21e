"""Train speculative-decoding drafts from a store: the draft is resident, the target is not."""
