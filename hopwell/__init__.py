"""Hopwell: exact attention for Hopper and Blackwell."""
