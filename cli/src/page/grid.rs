//! What each module of each layer is, as coloured squares.
use super::chart::class;
use super::said;
use crate::report::plain;
use maud::{Markup, html};

const SIDE: f64 = 18.0;
/// Room for the names of rows, and of columns.
const LEFT: f64 = 96.0;
const TOP: f64 = 22.0;

/// A picture before it is drawn.
pub struct Grid {
    pub title: String,
    /// Modules.
    pub rows: Vec<String>,
    /// Layers.
    pub columns: Vec<String>,
    /// What a square may be, each in a colour of its own.
    pub kinds: Vec<String>,
    /// Of rows, by columns.
    pub cells: Vec<Vec<Option<Cell>>>,
}

/// A module of a layer.
pub struct Module {
    pub layer: Option<usize>,
    pub name: String,
    /// What it is.
    pub kind: String,
    /// What is shown when somebody points at it.
    pub says: String,
}

/// A square.
pub struct Cell {
    /// Which of the kinds.
    pub kind: usize,
    /// What is shown when somebody points at it.
    pub says: String,
}

impl Grid {
    /// Of modules; those without a layer have no square.
    pub fn of_layers(title: &str, modules: impl IntoIterator<Item = Module>) -> Self {
        let modules: Vec<_> = modules.into_iter().filter_map(|m| Some((m.layer?, m))).collect();
        let (mut rows, mut kinds) = (Vec::new(), Vec::new());
        for (_, module) in &modules {
            for (all, name) in [(&mut rows, &module.name), (&mut kinds, &module.kind)] {
                if !all.contains(name) {
                    all.push(name.clone());
                }
            }
        }
        let layers = modules.iter().map(|(layer, _)| layer + 1).max().unwrap_or(0);
        let place = |all: &[String], name: &String| all.iter().position(|n| n == name).unwrap_or_default();
        let mut cells: Vec<Vec<Option<Cell>>> =
            rows.iter().map(|_| (0..layers).map(|_| None).collect()).collect();
        for (layer, Module { name, kind, says, .. }) in modules {
            cells[place(&rows, &name)][layer] = Some(Cell { kind: place(&kinds, &kind), says });
        }
        let columns = (0..layers).map(|i| i.to_string()).collect();
        Self { title: title.to_owned(), rows, columns, kinds, cells }
    }

    /// As a figure.
    pub fn svg(&self) -> Markup {
        let columns = self.columns.len();
        let width = (LEFT + SIDE * columns as f64 + 8.0).max(520.0);
        let height = TOP + SIDE * self.rows.len() as f64 + 4.0;
        let side = ((width - LEFT - 8.0) / columns.max(1) as f64).min(2.5 * SIDE);
        let every = columns.div_ceil(((width - LEFT) / 34.0) as usize).max(1);
        let x = |at: usize| LEFT + side * at as f64;
        let y = |at: usize| TOP + SIDE * at as f64;
        let count =
            |kind: usize| self.cells.iter().flatten().flatten().filter(|cell| cell.kind == kind).count();
        let size = format!("0 0 {width:.0} {height:.0}");
        html! { figure {
            figcaption { (said(&self.title)) }
            svg viewBox=(size) width=(tenths(width)) height=(tenths(height)) role="img"
                aria-label=(plain(&self.title)) {
                @for (at, name) in self.columns.iter().enumerate().step_by(every) {
                    text x=(tenths(x(at) + side / 2.0)) y=(TOP - 8.0) text-anchor="middle" { (said(name)) }
                }
                @for (at, (name, cells)) in self.rows.iter().zip(&self.cells).enumerate() {
                    text x=(LEFT - 8.0) y=(tenths(y(at) + 13.0)) text-anchor="end" { (said(name)) }
                    @for (column, cell) in cells.iter().enumerate() { @if let Some(cell) = cell {
                        rect class=(class(cell.kind)) x=(tenths(x(column) + 1.0)) y=(tenths(y(at) + 1.0))
                            width=(tenths(side - 2.0)) height=(tenths(SIDE - 2.0)) rx="2" {
                            title { (said(&cell.says)) }
                        }
                    } }
                }
            }
            ul.legend { @for (kind, name) in self.kinds.iter().enumerate() {
                li {
                    svg viewBox="0 0 14 14" width="14" height="14" aria-hidden="true" {
                        rect class=(class(kind)) width="14" height="14" rx="2" {}
                    }
                    (said(name)) ": " (count(kind))
                }
            } }
        } }
    }
}

fn tenths(value: f64) -> String {
    format!("{value:.1}")
}
