//! Takes a function and its companions from their drivers, and gives them back.
