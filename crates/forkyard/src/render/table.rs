//! Tables that fit: aligned columns on a wide terminal, one block a row on a narrow one, tabs nowhere.

use std::borrow::Cow;

use super::plain::{fit, plain, width, wrap};
use super::style::{Color, Style};

/// Between two columns.
const GAP: usize = 2;
/// The column that gives way is not made narrower than this before blocks are used instead.
const MIN_FLEXIBLE: usize = 12;
/// A block's value has at least this much room beside its title; else it stands below.
const MIN_VALUE: usize = 8;
/// Of what stands below a title.
const BELOW: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

#[derive(Debug, Clone)]
pub struct Column {
    pub title: Cow<'static, str>,
    pub align: Align,
}

pub fn left(title: impl Into<Cow<'static, str>>) -> Column {
    Column { title: title.into(), align: Align::Left }
}
pub fn right(title: impl Into<Cow<'static, str>>) -> Column {
    Column { title: title.into(), align: Align::Right }
}

/// A cell's text is made harmless when it is made.
#[derive(Debug, Clone, Default)]
pub struct Cell {
    text: String,
    color: Option<Color>,
}

impl Cell {
    pub fn new(text: impl AsRef<str>) -> Cell {
        Cell { text: plain(text.as_ref()), color: None }
    }
    pub fn color(mut self, color: Color) -> Cell {
        self.color = Some(color);
        self
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::new(text)
    }
}

#[derive(Debug, Clone)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
    wraps: bool,
}

impl Table {
    /// The last column gives way where the width is short.
    pub fn new(columns: Vec<Column>) -> Table {
        Table { columns, rows: Vec::new(), wraps: false }
    }

    /// What does not fit into the last column goes on below it instead of being cut.
    pub fn wraps(self) -> Table {
        Table { wraps: true, ..self }
    }

    pub fn row(&mut self, cells: Vec<Cell>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn render(&self, style: &Style) -> String {
        // A column that nobody filled says nothing.
        let used: Vec<usize> = (0..self.columns.len())
            .filter(|i| *i == 0 || self.rows.iter().any(|r| !r[*i].text.is_empty()))
            .collect();
        let mut widths: Vec<usize> = used
            .iter()
            .map(|i| {
                let cells = self.rows.iter().map(|r| width(&r[*i].text)).max().unwrap_or(0);
                cells.max(width(&self.columns[*i].title))
            })
            .collect();
        let total = |w: &[usize]| w.iter().sum::<usize>() + GAP * w.len().saturating_sub(1);
        let over = total(&widths).saturating_sub(style.width);
        if over > 0 {
            let last = widths.last_mut().expect("the first column is always used");
            if *last < over + MIN_FLEXIBLE {
                return self.blocks(&used, style);
            }
            *last -= over;
        }
        let mut out = String::new();
        let titles: Vec<Cell> = self
            .columns
            .iter()
            .map(|c| Cell { text: c.title.to_string(), color: Some(Color::Bold) })
            .collect();
        for row in std::iter::once(&titles).chain(&self.rows) {
            out.push_str(&self.line(row, &used, &widths, style));
            out.push('\n');
            for more in self.rest(row, &used, &widths) {
                let indent = total(&widths) - widths.last().expect("the first column is always used");
                let last = &row[*used.last().expect("the first column is always used")];
                out.push_str(&" ".repeat(indent));
                out.push_str(&last.color.map_or(more.clone(), |c| style.paint(c, &more)));
                out.push('\n');
            }
        }
        out
    }

    fn line(&self, row: &[Cell], used: &[usize], widths: &[usize], style: &Style) -> String {
        let mut line = String::new();
        for (n, (i, w)) in used.iter().zip(widths).enumerate() {
            let text = if self.wraps && n + 1 == used.len() {
                wrap(&row[*i].text, *w).swap_remove(0)
            } else {
                fit(&row[*i].text, *w)
            };
            let pad = " ".repeat(w.saturating_sub(width(&text)));
            let painted = row[*i].color.map_or(text.clone(), |c| style.paint(c, &text));
            if n > 0 {
                line.push_str(&" ".repeat(GAP));
            }
            match self.columns[*i].align {
                Align::Right => line.push_str(&(pad + &painted)),
                // No spaces at a line's end.
                Align::Left if n + 1 == used.len() => line.push_str(&painted),
                Align::Left => line.push_str(&(painted + &pad)),
            }
        }
        line.trim_end().to_string()
    }

    /// Of the last column, what its first line has no room for.
    fn rest(&self, row: &[Cell], used: &[usize], widths: &[usize]) -> Vec<String> {
        match (used.last(), widths.last()) {
            (Some(i), Some(w)) if self.wraps => {
                wrap(&row[*i].text, *w).iter().skip(1).map(|l| l.trim_start().to_string()).collect()
            }
            _ => vec![],
        }
    }

    fn blocks(&self, used: &[usize], style: &Style) -> String {
        let mut out = String::new();
        for row in &self.rows {
            for (n, i) in used.iter().enumerate().filter(|(_, i)| !row[**i].text.is_empty()) {
                let title = &self.columns[*i].title;
                let indent = if n == 0 { "" } else { "  " };
                let beside = width(title) + indent.len() + 1;
                let room = style.width.saturating_sub(beside);
                let fits = room >= MIN_VALUE || width(&row[*i].text) <= room;
                let (hang, room) =
                    if fits { (beside, room) } else { (BELOW, style.width.saturating_sub(BELOW)) };
                out.push_str(&format!("{indent}{}", style.paint(Color::Bold, title)));
                for (l, text) in wrap(&row[*i].text, room).iter().enumerate() {
                    // What a space was broken at is no indent.
                    let text = if l == 0 { text } else { text.trim_start() };
                    let before = if l == 0 && fits { " ".into() } else { format!("\n{}", " ".repeat(hang)) };
                    out.push_str(&before);
                    out.push_str(&row[*i].color.map_or(text.to_string(), |c| style.paint(c, text)));
                }
                out.push('\n');
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut t = Table::new(vec![left("Fork"), right("Cost"), left("Empty"), left("Error")]);
        t.row(vec!["0".into(), "$1.25".into(), "".into(), "".into()]);
        t.row(vec!["10".into(), "$0.5".into(), "".into(), "it went wrong\x1b[2J in a long way".into()]);
        t
    }

    #[test]
    fn wide_and_in_a_pipe_it_is_aligned_and_whole() {
        assert_eq!(
            table().render(&Style::PIPE),
            "Fork   Cost  Error\n0     $1.25\n10     $0.5  it went wrong\\x1b[2J in a long way\n"
        );
    }

    #[test]
    fn narrower_it_cuts_the_last_column_and_then_turns_to_blocks() {
        for columns in 20..80 {
            let style = Style { color: false, width: columns, height: Some(24) };
            for line in table().render(&style).lines() {
                assert!(width(line) <= columns, "{columns}: {line:?}");
            }
        }
        let style = Style { color: false, width: 26, height: Some(24) };
        assert_eq!(table().render(&style), "Fork   Cost  Error\n0     $1.25\n10     $0.5  it went wron…\n");
        let style = Style { color: false, width: 20, height: Some(24) };
        assert_eq!(
            table().render(&style),
            "Fork 0\n  Cost $1.25\nFork 10\n  Cost $0.5\n\
             \x20 Error it went\n        wrong\\x1b[2J\n        in a long\n        way\n"
        );
    }

    #[test]
    fn what_must_not_be_lost_goes_on_below() {
        let style = Style { color: false, width: 26, height: Some(24) };
        assert_eq!(
            table().wraps().render(&style),
            "Fork   Cost  Error\n0     $1.25\n10     $0.5  it went\n\
             \x20            wrong\\x1b[2J\n             in a long way\n"
        );
        assert_eq!(table().wraps().render(&Style::PIPE), table().render(&Style::PIPE));
        let letters = |s: &str| s.chars().filter(|c| !c.is_whitespace()).collect::<String>();
        for columns in 20..80 {
            let style = Style { color: false, width: columns, height: Some(24) };
            let text = table().wraps().render(&style);
            assert!(letters(&text).contains(&letters("it went wrong\\x1b[2J in a long way")), "{text}");
            assert!(text.lines().all(|l| width(l) <= columns), "{columns}: {text}");
        }
    }

    #[test]
    fn colour_does_not_change_the_shape() {
        let mut t = Table::new(vec![left("A"), left("B")]);
        t.row(vec![Cell::new("x").color(Color::Green), "y".into()]);
        let style = Style { color: true, width: 80, height: Some(24) };
        assert_eq!(t.render(&style), "\x1b[1mA\x1b[0m  \x1b[1mB\x1b[0m\n\x1b[32mx\x1b[0m  y\n");
    }
}
