"""One module a serving engine: the layouts it reads, by kind of head."""
