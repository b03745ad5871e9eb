"""What ties caches to other libraries. Each is imported by its own name and asks for its own extra; the core knows none of them."""
