"""Clients of OpenAI and Anthropic, unmodified, each in an environment of its own."""
