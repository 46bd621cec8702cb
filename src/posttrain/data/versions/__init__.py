"""Dataset versions: from files and a recipe through shards to what is stored, compared, told and let go."""
