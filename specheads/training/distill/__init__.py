"""Text that the base writes itself: what is asked, who answers, what is kept."""
