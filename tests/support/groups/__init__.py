"""Coordinators, members and models of groups."""
