"""A run as figures, on a page and as a picture; the extra ``report`` brings matplotlib, which `drawing` and `images` import when asked."""
