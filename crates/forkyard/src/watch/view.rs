//! Draws a [`Screen`]. Everything that it draws has passed through `plain()`; no size of a terminal is too small for it.

use ratatui::Frame;
use ratatui::layout::{Position, Rect};
use ratatui::style::{Color as Paint, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

use super::model::{Mode, Pane, Patch, Screen};
use super::rows::Part;
use crate::commands::list;
use crate::render::{Color, fit, plain, width};

/// Lower terminals do not show the task.
const TASK_FROM: u16 = 16;
/// The forks get at most this share of what is left, in percent.
const FORKS_SHARE: u16 = 40;
/// Less room than this is not worth a pane.
const MIN_PANE: u16 = 3;

const HELP: &[(&str, &str)] = &[
    ("↑ ↓  k j", "choose a fork"),
    ("tab  d", "what it says and does, or what it changed"),
    ("pgup pgdn  b space", "scroll; J K by line, g G to the ends"),
    ("enter  z", "give the lower half all of the screen"),
    ("m", "say something to the fork; it reads it before its next tool call"),
    ("i", "interrupt what it does and say something"),
    ("M", "say something to all forks"),
    ("p", "pause the run, or let it go on"),
    ("a", "add forks"),
    ("c  C", "cancel the fork, or the run; work that is done stays"),
    ("q  ctrl-c", "leave; the run goes on"),
];

pub fn draw(screen: &Screen, frame: &mut Frame<'_>, color: bool) {
    let theme = Theme { color };
    let area = frame.area();
    let mut rest = area;
    if area.height >= 2 {
        footer(screen, frame, take_bottom(&mut rest, 1), theme);
    }
    if area.height >= 3 {
        head(screen, frame, take_top(&mut rest, 1), theme);
    }
    if area.height >= TASK_FROM {
        let prompt = plain(screen.board.run.prompt.lines().next().unwrap_or_default());
        let row = take_top(&mut rest, 1);
        put(frame, row, Line::styled(fit(&prompt, usize::from(row.width)), theme.of(Color::Dim)));
    }
    if !screen.zoomed {
        let forks = u16::try_from(screen.board.forks.len()).unwrap_or(u16::MAX).max(1);
        let most = (u32::from(rest.height) * u32::from(FORKS_SHARE) / 100) as u16;
        let mut rows = forks.saturating_add(1).min(most.max(2));
        if rest.height < rows + MIN_PANE {
            rows = rest.height;
        }
        list_of_forks(screen, frame, take_top(&mut rest, rows), theme);
    }
    if rest.height > 0 {
        pane(screen, frame, rest, theme);
    }
    if screen.mode == Mode::Help {
        help(frame, area, theme);
    }
}

#[derive(Clone, Copy)]
struct Theme {
    color: bool,
}

impl Theme {
    /// Without colour what is bold or dim stays so: it is no colour.
    fn of(self, color: Color) -> Style {
        let paint = match color {
            Color::Bold => return Style::new().add_modifier(Modifier::BOLD),
            Color::Dim => return Style::new().add_modifier(Modifier::DIM),
            Color::Green => Paint::Green,
            Color::Red => Paint::Red,
            Color::Yellow => Paint::Yellow,
            Color::Cyan => Paint::Cyan,
        };
        if self.color { Style::new().fg(paint) } else { Style::new() }
    }
}

fn take_top(rest: &mut Rect, rows: u16) -> Rect {
    let rows = rows.min(rest.height);
    let taken = Rect { height: rows, ..*rest };
    rest.y += rows;
    rest.height -= rows;
    taken
}

fn take_bottom(rest: &mut Rect, rows: u16) -> Rect {
    let rows = rows.min(rest.height);
    rest.height -= rows;
    Rect { y: rest.y + rest.height, height: rows, ..*rest }
}

fn put(frame: &mut Frame<'_>, area: Rect, line: Line<'_>) {
    frame.render_widget(line, area);
}

fn head(screen: &Screen, frame: &mut Frame<'_>, area: Rect, theme: Theme) {
    let run = &screen.board.run;
    let (word, color) = match screen.idle && !run.detached {
        true => ("nobody drives it", Color::Yellow),
        false => list::state(run),
    };
    let (forks, money) = screen.board.total_texts();
    let best = run.winner.map(|n| format!("  ★ {n}")).unwrap_or_default();
    let still = if screen.stands_still() { "  (p: go on)" } else { "" };
    let text = format!("{still}  {forks}  {money}{best}");
    let name = format!("forkyard {} ", run.id);
    let room = usize::from(area.width).saturating_sub(width(&name) + width(word));
    put(
        frame,
        area,
        Line::from(vec![
            Span::styled(name, theme.of(Color::Bold)),
            Span::styled(word, theme.of(color).add_modifier(Modifier::BOLD)),
            Span::raw(fit(&text, room)),
        ]),
    );
}

/// A line over the whole width, with a title in it.
fn rule(frame: &mut Frame<'_>, area: Rect, title: Vec<Span<'_>>, theme: Theme) {
    let used: usize = title.iter().map(|s| width(&s.content)).sum();
    let mut spans = vec![Span::styled("─ ", theme.of(Color::Dim))];
    spans.extend(title);
    let left = usize::from(area.width).saturating_sub(used + 3);
    spans.push(Span::styled(format!(" {}", "─".repeat(left)), theme.of(Color::Dim)));
    put(frame, area, Line::from(spans));
}

fn list_of_forks(screen: &Screen, frame: &mut Frame<'_>, mut area: Rect, theme: Theme) {
    let forks = &screen.board.forks;
    let chosen = forks.iter().position(|f| f.fork == screen.chosen).unwrap_or(0);
    let window = |rows: usize| {
        let from = chosen.saturating_sub(rows / 2).min(forks.len().saturating_sub(rows));
        from..(from + rows).min(forks.len())
    };
    if area.height >= 2 {
        let row = take_top(&mut area, 1);
        let shown = window(usize::from(area.height));
        let title = match (forks.get(shown.start), forks.get(shown.end.saturating_sub(1))) {
            (Some(first), Some(last)) if shown.len() < forks.len() => {
                format!("Forks {} to {}, {} in all", first.fork, last.fork, forks.len())
            }
            _ => "Forks".into(),
        };
        rule(frame, row, vec![Span::styled(title, theme.of(Color::Bold))], theme);
    }
    let digits = screen.board.digits();
    for f in &forks[window(usize::from(area.height))] {
        let row = take_top(&mut area, 1);
        let text = screen.board.fork_text(f, digits);
        let here = f.fork == screen.chosen;
        let pointer = if here { "▸" } else { " " };
        let room = usize::from(row.width).saturating_sub(width(&text.head) + 1);
        let mut line = Line::from(vec![
            Span::raw(pointer),
            Span::styled(text.head, theme.of(text.color)),
            Span::raw(fit(&text.rest, room)),
        ]);
        if here {
            line = line.style(Style::new().add_modifier(Modifier::REVERSED));
            frame.buffer_mut().set_style(row, Style::new().add_modifier(Modifier::REVERSED));
        }
        put(frame, row, line);
    }
}

fn pane(screen: &Screen, frame: &mut Frame<'_>, mut area: Rect, theme: Theme) {
    let tab = |pane: Pane, text: &'static str| {
        let style = match screen.pane == pane {
            true => theme.of(Color::Bold).add_modifier(Modifier::UNDERLINED),
            false => theme.of(Color::Dim),
        };
        Span::styled(text, style)
    };
    let session = screen.session();
    let mut title = vec![
        Span::styled(format!("{}/{} ", screen.board.run.id, screen.chosen), theme.of(Color::Bold)),
        tab(Pane::Feed, "Feed"),
        Span::raw(" "),
        tab(Pane::Diff, "Diff"),
    ];
    let note = match (screen.pane, session) {
        (Pane::Feed, Some(s)) => {
            s.feed_end.map(|end| format!(" {} lines below (G: to the end)", s.feed.end() - end))
        }
        (Pane::Diff, Some(s)) => match &s.result {
            Patch::Here(_) => None,
            Patch::Asked => Some(" …".into()),
            Patch::Missing(why) => Some(format!(" {}", plain(why))),
            Patch::Unasked => Some(" edits so far; the result follows at the end".into()),
        },
        (Pane::Feed | Pane::Diff, None) => None,
    };
    let row = take_top(&mut area, 1);
    if let Some(note) = note {
        let used: usize = title.iter().map(|s| width(&s.content)).sum();
        let room = usize::from(row.width).saturating_sub(used + 3);
        title.push(Span::styled(fit(&note, room), theme.of(Color::Dim)));
    }
    rule(frame, row, title, theme);
    let (columns, height) = (usize::from(area.width), usize::from(area.height));
    let rows = match (screen.pane, session) {
        (Pane::Feed, Some(s)) => s.feed.up_from(s.feed_end.unwrap_or(s.feed.end()), columns, height),
        (Pane::Diff, Some(s)) => s.diff().down_from(s.diff_top, columns, height),
        (Pane::Feed | Pane::Diff, None) => vec![],
    };
    if rows.is_empty() {
        put(frame, area, Line::styled(fit(nothing(screen), columns), theme.of(Color::Dim)));
    }
    for part in rows {
        put(frame, take_top(&mut area, 1), painted(part, theme));
    }
}

fn nothing(screen: &Screen) -> &'static str {
    match (screen.pane, screen.fork().map(|f| f.outcome.is_some())) {
        (_, None) => "The base is being prepared: fetched, checked out, set up. The forks follow.",
        (Pane::Feed, Some(true)) => "Its agent said nothing.",
        (Pane::Feed, Some(false)) => "Its agent has not begun.",
        (Pane::Diff, Some(true)) => "It changed nothing.",
        (Pane::Diff, Some(false)) => "It has changed nothing yet.",
    }
}

fn painted(part: Part<'_>, theme: Theme) -> Line<'static> {
    let Part { row, text, first } = part;
    let style = row.text_color.map(|c| theme.of(c)).unwrap_or_default();
    if !first {
        return Line::from(vec![Span::raw(" ".repeat(width(&row.mark))), Span::styled(text, style)]);
    }
    // Time and mark: the mark alone has a colour.
    let (time, mark) = row.mark.split_once(' ').unwrap_or(("", &row.mark));
    let gap = if time.is_empty() { "" } else { " " };
    Line::from(vec![
        Span::styled(format!("{time}{gap}"), theme.of(Color::Dim)),
        Span::styled(mark.to_string(), theme.of(row.mark_color)),
        Span::styled(text, style),
    ])
}

fn footer(screen: &Screen, frame: &mut Frame<'_>, area: Rect, theme: Theme) {
    let columns = usize::from(area.width);
    match &screen.mode {
        Mode::Message { to, interrupt, line } => {
            let whom = to.map_or("all forks".to_string(), |n| format!("fork {n}"));
            let verb = if *interrupt { "Interrupt" } else { "To" };
            input(frame, area, &format!("{verb} {whom} (enter sends): "), line.halves(), theme);
        }
        Mode::Add { line } => {
            input(frame, area, "How many forks more (enter adds): ", line.halves(), theme);
        }
        Mode::Cancel(what) => {
            let what = what.map_or(format!("the run {}", screen.board.run.id), |n| format!("fork {n}"));
            let text =
                format!("Cancel {what}? What is done stays for diff and apply. y: yes, any other key: no");
            put(
                frame,
                area,
                Line::styled(fit(&text, columns), theme.of(Color::Yellow).add_modifier(Modifier::BOLD)),
            );
        }
        Mode::Look | Mode::Help => match &screen.notice {
            Some(notice) => {
                let color = if notice.bad { Color::Red } else { Color::Green };
                put(frame, area, Line::styled(fit(&plain(&notice.text), columns), theme.of(color)));
            }
            None => put(frame, area, keys(screen, columns, theme)),
        },
    }
}

/// Those that do something now; the last ones go first where there is no room.
fn keys(screen: &Screen, columns: usize, theme: Theme) -> Line<'static> {
    let live = screen.fork().is_some_and(|f| f.outcome.is_none()) && !screen.ended();
    let pane = match screen.pane {
        Pane::Feed => "diff",
        Pane::Diff => "feed",
    };
    let pause = if screen.stands_still() { "go on" } else { "pause" };
    let all = [
        (true, "q", "leave"),
        (true, "?", "keys"),
        (screen.board.forks.len() > 1, "↑↓", "fork"),
        (true, "tab", pane),
        (live, "m", "message"),
        (!screen.ended(), "p", pause),
        (live, "c", "cancel"),
        (!screen.ended(), "a", "add"),
        (true, "z", "zoom"),
    ];
    let mut spans = Vec::new();
    let mut used = 0;
    for (_, key, what) in all.into_iter().filter(|(on, _, _)| *on) {
        let gap = if spans.is_empty() { 0 } else { 2 };
        let wide = gap + width(key) + 1 + width(what);
        if used + wide > columns {
            break;
        }
        used += wide;
        spans.push(Span::raw(" ".repeat(gap)));
        spans.push(Span::styled(key, theme.of(Color::Bold)));
        spans.push(Span::styled(format!(" {what}"), theme.of(Color::Dim)));
    }
    Line::from(spans)
}

/// A line of text with the terminal's cursor in it; of a long one the part around the cursor.
fn input(frame: &mut Frame<'_>, area: Rect, label: &str, (before, after): (String, String), theme: Theme) {
    // On a narrow terminal the text matters more than its label.
    let label = fit(label, usize::from(area.width) / 2);
    let room = usize::from(area.width).saturating_sub(width(&label) + 1);
    let shown = |text: &str| plain(&text.replace('\n', "⏎"));
    let (mut before, after) = (shown(&before), shown(&after));
    while width(&before) > room {
        before.remove(0);
    }
    let at = width(&label) + width(&before);
    let text = format!("{before}{}", fit(&after, room.saturating_sub(width(&before))));
    put(frame, area, Line::from(vec![Span::styled(label, theme.of(Color::Bold)), Span::raw(text)]));
    let x = area.x + u16::try_from(at).unwrap_or(u16::MAX).min(area.width.saturating_sub(1));
    frame.set_cursor_position(Position { x, y: area.y });
}

fn help(frame: &mut Frame<'_>, area: Rect, theme: Theme) {
    let keys = HELP.iter().map(|(k, _)| width(k)).max().unwrap_or(0);
    let lines: Vec<Line<'_>> = HELP
        .iter()
        .map(|(key, what)| {
            let pad = " ".repeat(keys - width(key) + 2);
            Line::from(vec![Span::styled(*key, theme.of(Color::Bold)), Span::raw(format!("{pad}{what}"))])
        })
        .collect();
    let wide = lines.iter().map(Line::width).max().unwrap_or(0) + 4;
    let wide = u16::try_from(wide).unwrap_or(u16::MAX).min(area.width);
    let high = u16::try_from(lines.len() + 2).unwrap_or(u16::MAX).min(area.height);
    let at = Rect {
        x: area.x + (area.width - wide) / 2,
        y: area.y + (area.height - high) / 2,
        width: wide,
        height: high,
    };
    frame.render_widget(Clear, at);
    let block = Block::bordered().title(" Keys ").padding(ratatui::widgets::Padding::horizontal(1));
    frame.render_widget(Paragraph::new(lines).block(block), at);
}
