"""Rows that leave one engine and go on in another."""
