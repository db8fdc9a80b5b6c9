"""Who answers: a module an engine, each with `build(how: Writing) -> Engine`."""
