"""The generated pages of docs/, a module for each group of pages."""
