"""Texts that are part of the checkout, and how they were made."""
