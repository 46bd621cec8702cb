"""Records: their Arrow schema, texts and ids, and the tables that data steps return."""
