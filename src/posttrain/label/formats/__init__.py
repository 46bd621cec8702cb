"""Files of other labelling tools, read into items of the queue and written from them."""
