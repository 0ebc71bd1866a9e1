"""Integer arithmetic of regions, spans, shardings and atoms; knows nothing of files or frameworks."""
