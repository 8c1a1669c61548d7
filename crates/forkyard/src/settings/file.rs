//! A TOML file as a flat list of keys, each with its line. Tables nest; what a key means is not known here.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

use super::error::{Origin, Problem};
use super::value::Raw;

/// Larger than any sane configuration; a project's file is hostile input.
pub const MAX_FILE_BYTES: usize = 256 * 1024;
/// Deeper than any key that there is.
const MAX_DEPTH: usize = 8;

#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Dotted: `sandbox.memory`.
    pub key: String,
    pub line: usize,
    pub raw: Raw,
}

/// Reads all keys. `is_table` says which keys take a whole table as their value; what `is_foreign` is listed by its name alone.
pub fn read(
    text: &str,
    origin: impl Fn(usize) -> Origin,
    is_table: impl Fn(&str) -> bool,
    is_foreign: impl Fn(&str) -> bool,
) -> Result<Vec<Entry>, Problem> {
    if text.len() > MAX_FILE_BYTES {
        return Err(Problem {
            origin: origin(1),
            what: format!("the file has {} bytes", text.len()),
            fix: format!("at most {MAX_FILE_BYTES} are read"),
        });
    }
    let line_at = |offset: usize| text[..offset.min(text.len())].matches('\n').count() + 1;
    let table = DeTable::parse(text).map_err(|e| Problem {
        origin: origin(e.span().map_or(1, |s| line_at(s.start))),
        what: e.message().to_string(),
        fix: "write TOML".into(),
    })?;
    let mut walk = Walk {
        entries: Vec::new(),
        line_at: &line_at,
        origin: &origin,
        is_table: &is_table,
        is_foreign: &is_foreign,
    };
    walk.table("", table.get_ref(), 0)?;
    walk.entries.sort_by_key(|e| e.line);
    Ok(walk.entries)
}

struct Walk<'a> {
    entries: Vec<Entry>,
    line_at: &'a dyn Fn(usize) -> usize,
    origin: &'a dyn Fn(usize) -> Origin,
    is_table: &'a dyn Fn(&str) -> bool,
    is_foreign: &'a dyn Fn(&str) -> bool,
}

impl Walk<'_> {
    fn table(&mut self, prefix: &str, table: &DeTable<'_>, depth: usize) -> Result<(), Problem> {
        for (name, value) in table {
            let line = (self.line_at)(name.span().start);
            let key = if prefix.is_empty() {
                name.get_ref().to_string()
            } else {
                format!("{prefix}.{}", name.get_ref())
            };
            if (self.is_foreign)(&key) {
                self.entries.push(Entry { key, line, raw: Raw::List(Vec::new()) });
                continue;
            }
            match value.get_ref() {
                DeValue::Table(inner) if !(self.is_table)(&key) => {
                    if depth >= MAX_DEPTH {
                        return Err(self.problem(line, &key, "is nested too deep"));
                    }
                    self.table(&key, inner, depth + 1)?;
                }
                DeValue::Table(inner) => {
                    let mut pairs = BTreeMap::new();
                    for (k, v) in inner {
                        let v = scalar(v.get_ref())
                            .ok_or_else(|| self.problem(line, &key, "has a value that is not a plain one"))?;
                        pairs.insert(k.get_ref().to_string(), v);
                    }
                    self.entries.push(Entry { key, line, raw: Raw::Table(pairs) });
                }
                DeValue::Array(items) => {
                    let list: Option<Vec<String>> = items.iter().map(|i| scalar(i.get_ref())).collect();
                    let list = list.ok_or_else(|| {
                        self.problem(line, &key, "is a list of something else than plain values")
                    })?;
                    self.entries.push(Entry { key, line, raw: Raw::List(list) });
                }
                plain @ (DeValue::String(_)
                | DeValue::Integer(_)
                | DeValue::Float(_)
                | DeValue::Boolean(_)
                | DeValue::Datetime(_)) => {
                    let raw = Raw::Text(scalar(plain).unwrap_or_default());
                    self.entries.push(Entry { key, line, raw });
                }
            }
        }
        Ok(())
    }

    fn problem(&self, line: usize, key: &str, what: &str) -> Problem {
        Problem {
            origin: (self.origin)(line),
            what: format!("`{key}` {what}"),
            fix: "see docs/configuration.md for what it takes".into(),
        }
    }
}

fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(s) => Some(s.to_string()),
        DeValue::Integer(i) => Some(i.to_string()),
        DeValue::Float(f) => Some(f.to_string()),
        DeValue::Boolean(b) => Some(b.to_string()),
        DeValue::Datetime(d) => Some(d.to_string()),
        DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(line: usize) -> Origin {
        Origin::File { path: "c.toml".into(), line }
    }

    #[test]
    fn keys_are_flat_and_know_their_lines() {
        let text = "a = 1\n\n[b]\nc = \"x\"\nd = [1, 2]\n[b.e]\nf = true\n[env]\nX = \"1\"\n";
        let entries = read(text, origin, |k| k == "env", |_| false).unwrap();
        let flat: Vec<String> =
            entries.iter().map(|e| format!("{}:{}={}", e.line, e.key, e.raw.show())).collect();
        assert_eq!(flat, ["1:a=1", "4:b.c=x", "5:b.d=1,2", "7:b.e.f=true", "8:env=X=1"]);
    }

    #[test]
    fn broken_files_say_where() {
        let p = read("a = 1\nb = = 2\n", origin, |_| false, |_| false).unwrap_err();
        assert_eq!(p.origin, origin(2));
        let p = read("[[a]]\nb = 1\n", origin, |_| false, |_| false).unwrap_err();
        assert!(p.to_string().starts_with("c.toml:1: `a` is a list of something else"), "{p}");
        let deep = "a.".repeat(20) + "a = 1";
        assert!(read(&deep, origin, |_| false, |_| false).unwrap_err().what.contains("nested too deep"));
        assert!(read(&"#".repeat(MAX_FILE_BYTES + 1), origin, |_| false, |_| false).is_err());
    }
}
