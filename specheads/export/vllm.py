"""The plug-in's name in exported command lines, kept: see plugins/vllm.py."""

from specheads.export.plugins.vllm import Proposer, register

__all__ = ["Proposer", "register"]
