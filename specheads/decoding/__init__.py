"""The loop: draft, verify, accept, commit; one step, many requests, whole prompts."""
