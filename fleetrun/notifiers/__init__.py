"""Tells people of a job: by a webhook, by a command, or by a notifier of another package."""
