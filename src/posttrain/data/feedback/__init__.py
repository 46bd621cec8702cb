"""Feedback of users, from the endpoint's inbox to files of records."""
