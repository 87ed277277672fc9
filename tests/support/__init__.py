"""Worlds, fakes and checkers that tests share."""
