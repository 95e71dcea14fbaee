"""Measurements against real servers. Nothing here is part of the installed package."""
