// Up to 128 rows of a step that follow each other in a sequence: rows `first` on, at `position` on. `list`: where the
// sequence's page numbers begin.
struct Run {
    u32 first, rows, position, list;
};
