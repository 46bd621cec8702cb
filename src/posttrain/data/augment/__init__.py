"""Ways to make a record's input another that asks for the same answer; one file each."""
