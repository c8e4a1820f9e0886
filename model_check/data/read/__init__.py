"""All that training needs of a prepared entry."""
