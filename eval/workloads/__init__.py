"""Recorded agent sessions in one form, and how they become prompts for a small model."""
