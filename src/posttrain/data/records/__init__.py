"""What a record is: its schema, its content in normal form, and the identities that are hashes of it."""
