"""Adapters to training frameworks that want more of an optimizer than torch does. Each imports its framework itself."""
