# A package with this file comes before others of its name that are installed.
