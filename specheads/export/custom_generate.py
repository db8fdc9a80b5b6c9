"""The name that pushed repositories import, kept: see plugins/custom_generate.py."""

from specheads.export.plugins.custom_generate import hub_generate

__all__ = ["hub_generate"]
