"""Heads in the layouts of serving engines, on the Hub, and inside other people's engines."""
