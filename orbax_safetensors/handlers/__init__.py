"""Orbax handlers: the only place that subclasses or registers with Orbax."""
