"""The name that pushed repositories import, kept: see plugins/hub_generate.py."""

from specheads.export.plugins.hub_generate import hub_generate

__all__ = ["hub_generate"]
