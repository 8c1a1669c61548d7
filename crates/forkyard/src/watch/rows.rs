//! Lines of a pane: kept up to a bound, wrapped to whatever width there is.

use std::collections::VecDeque;

use crate::render::{Color, fit, wrap};

/// Lines of one pane; older ones are in `forkyard logs`.
const MAX_ROWS: usize = 5_000;
/// Columns of one line: a minified file would fill many screens.
const MAX_COLUMNS: usize = 2_000;
const TAB: &str = "    ";

/// One line, harmless for a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub mark: String,
    pub mark_color: Color,
    pub text: String,
    pub text_color: Option<Color>,
}

/// What stands in one line of the screen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part<'a> {
    pub row: &'a Row,
    pub text: String,
    /// The row begins here: its mark is shown.
    pub first: bool,
}

/// Rows with numbers that stay when older ones go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rows {
    rows: VecDeque<Row>,
    /// Rows that have gone.
    gone: usize,
}

impl Rows {
    pub fn push(&mut self, mut row: Row) {
        row.text = fit(&row.text.replace('\t', TAB), MAX_COLUMNS);
        self.rows.push_back(row);
        if self.rows.len() > MAX_ROWS {
            self.rows.pop_front();
            self.gone += 1;
        }
    }

    /// Number of the first row that is there.
    pub fn first(&self) -> usize {
        self.gone
    }
    /// One more than the number of the last row.
    pub fn end(&self) -> usize {
        self.gone + self.rows.len()
    }

    pub fn get(&self, number: usize) -> Option<&Row> {
        self.rows.get(number.checked_sub(self.gone)?)
    }

    /// Screen lines from row `top` on, not more than `height`.
    pub fn down_from(&self, top: usize, width: usize, height: usize) -> Vec<Part<'_>> {
        let mut out = Vec::new();
        for number in top.max(self.gone)..self.end() {
            if out.len() >= height {
                break;
            }
            let Some(row) = self.get(number) else { break };
            out.extend(wrapped(row, width));
        }
        out.truncate(height);
        out
    }

    /// Screen lines that end before row `end`, not more than `height`.
    pub fn up_from(&self, end: usize, width: usize, height: usize) -> Vec<Part<'_>> {
        let mut out: VecDeque<Part<'_>> = VecDeque::new();
        for number in (self.gone..end.min(self.end())).rev() {
            if out.len() >= height {
                break;
            }
            let Some(row) = self.get(number) else { break };
            for part in wrapped(row, width).into_iter().rev() {
                out.push_front(part);
            }
        }
        while out.len() > height {
            out.pop_front();
        }
        out.into()
    }
}

fn wrapped(row: &Row, width: usize) -> Vec<Part<'_>> {
    let lines = wrap(&row.text, width.saturating_sub(crate::render::width(&row.mark)));
    lines.into_iter().enumerate().map(|(i, text)| Part { row, text, first: i == 0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(text: &str) -> Row {
        Row { mark: "> ".into(), mark_color: Color::Dim, text: text.into(), text_color: None }
    }

    #[test]
    fn a_window_ends_or_begins_where_it_is_told() {
        let mut rows = Rows::default();
        for n in 0..10 {
            rows.push(row(&format!("line {n} is long")));
        }
        let texts = |v: Vec<Part<'_>>| v.into_iter().map(|p| p.text).collect::<Vec<_>>();
        assert_eq!(texts(rows.up_from(10, 80, 2)), ["line 8 is long", "line 9 is long"]);
        assert_eq!(texts(rows.up_from(3, 80, 9)).len(), 3);
        assert_eq!(texts(rows.down_from(8, 80, 9)), ["line 8 is long", "line 9 is long"]);
        assert_eq!(texts(rows.up_from(10, 12, 3)), ["long", "line 9 is", "long"]);
    }

    #[test]
    fn old_rows_go_and_numbers_stay() {
        let mut rows = Rows::default();
        for n in 0..MAX_ROWS + 3 {
            rows.push(row(&n.to_string()));
        }
        assert_eq!((rows.first(), rows.end()), (3, MAX_ROWS + 3));
        assert_eq!(rows.get(3).unwrap().text, "3");
        assert_eq!(rows.get(2), None);
        rows.push(row(&"x".repeat(10 * MAX_COLUMNS)));
        assert_eq!(crate::render::width(&rows.get(MAX_ROWS + 3).unwrap().text), MAX_COLUMNS);
    }
}
