//! Values as people write them: `2h`, `4GiB`, `$5`. One parser per type, used for flags, environment, files and defaults.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use forkyard_core::{Millis, Usd};
use serde_json::json;

/// What a source gave, before it has a type.
#[derive(Debug, Clone, PartialEq)]
pub enum Raw {
    Text(String),
    /// An array of a file. A text is split at commas where a list is wanted.
    List(Vec<String>),
    /// A table of a file.
    Table(BTreeMap<String, String>),
}

impl Raw {
    pub fn show(&self) -> String {
        match self {
            Raw::Text(t) => t.clone(),
            Raw::List(l) => l.join(","),
            Raw::Table(t) => t.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(","),
        }
    }
}

/// A type that a setting can have.
pub trait Value: Sized {
    /// For the reference: what one writes.
    const KIND: &'static str;
    /// Err says what to write instead.
    fn parse(raw: &Raw) -> Result<Self, String>;
    /// As `forkyard config` shows it; parsing it gives the same value again, secrets excepted.
    fn show(&self) -> String;
    fn json(&self) -> serde_json::Value {
        json!(self.show())
    }
    /// What it is when nothing gives it a value; None: that is an error.
    fn unset() -> Option<Self> {
        None
    }
    /// Whether it lies between the two; true for what has no order.
    fn within(&self, _min: &Self, _max: &Self) -> bool {
        true
    }
}

fn text(raw: &Raw) -> Result<&str, String> {
    match raw {
        Raw::Text(t) => Ok(t.trim()),
        Raw::List(_) => Err("write one value, not a list".into()),
        Raw::Table(_) => Err("write one value, not a table".into()),
    }
}

/// Number and unit, as in `4 GiB` or `1.5h`.
fn number_and_unit(t: &str) -> Option<(f64, &str)> {
    let end = t.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(t.len());
    let number: f64 = t[..end].replace('_', "").parse().ok()?;
    number.is_finite().then_some((number, t[end..].trim()))
}

impl Value for Millis {
    const KIND: &'static str = "duration";

    fn parse(raw: &Raw) -> Result<Self, String> {
        const HOW: &str = "write a duration like 90s, 15m, 2h, 1h30m or 1d; a bare number is seconds";
        let mut rest = text(raw)?;
        let mut total = 0.0_f64;
        if rest.is_empty() {
            return Err(HOW.into());
        }
        while !rest.is_empty() {
            let (number, tail) = number_and_unit(rest).ok_or(HOW)?;
            let end = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
            let unit_ms = match &tail[..end] {
                "ms" => 1.0,
                "" | "s" | "sec" | "secs" | "second" | "seconds" => 1e3,
                "m" | "min" | "mins" | "minute" | "minutes" => 60e3,
                "h" | "hour" | "hours" => 3600e3,
                "d" | "day" | "days" => 86_400e3,
                _ => return Err(HOW.into()),
            };
            total += number * unit_ms;
            rest = tail[end..].trim_start();
        }
        // Beyond this a float no longer counts milliseconds exactly; no setting comes near.
        if total > 1e15 { Err("too long".into()) } else { Ok(Millis(total.round() as u64)) }
    }

    fn show(&self) -> String {
        if self.0 == 0 {
            return "0s".into();
        }
        let mut out = String::new();
        let mut rest = self.0;
        for (unit, ms) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)] {
            if rest >= ms {
                out.push_str(&format!("{}{unit}", rest / ms));
                rest %= ms;
            }
        }
        out
    }

    fn json(&self) -> serde_json::Value {
        json!(self.0 as f64 / 1000.0)
    }

    fn within(&self, min: &Self, max: &Self) -> bool {
        (min..=max).contains(&self)
    }
}

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct ByteSize(pub u64);

impl Value for ByteSize {
    const KIND: &'static str = "size";

    fn parse(raw: &Raw) -> Result<Self, String> {
        const HOW: &str = "write a size like 512MiB, 4GiB or 10GB; a bare number is bytes";
        let (number, unit) = number_and_unit(text(raw)?).ok_or(HOW)?;
        let factor = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1024.0 * 1024.0,
            "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
            "t" | "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            _ => return Err(HOW.into()),
        };
        let bytes = number * factor;
        if bytes > 1e18 { Err("too large".into()) } else { Ok(ByteSize(bytes.round() as u64)) }
    }

    fn show(&self) -> String {
        for (unit, bytes) in [("TiB", 1_u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
            if self.0 >= bytes && self.0.is_multiple_of(bytes) {
                return format!("{}{unit}", self.0 / bytes);
            }
        }
        format!("{}B", self.0)
    }

    fn json(&self) -> serde_json::Value {
        json!(self.0)
    }

    fn within(&self, min: &Self, max: &Self) -> bool {
        (min..=max).contains(&self)
    }
}

impl Value for Usd {
    const KIND: &'static str = "dollars";

    fn parse(raw: &Raw) -> Result<Self, String> {
        let t = text(raw)?;
        let t = t.strip_prefix('$').or_else(|| t.strip_suffix("USD")).unwrap_or(t).trim();
        // Plain digits only: a float parser would take "inf" and "1e9" too.
        let plain = !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        plain
            .then(|| t.parse().ok().and_then(Usd::from_dollars))
            .flatten()
            .ok_or_else(|| "write an amount like $5 or 0.50, at most $1000000".into())
    }

    fn show(&self) -> String {
        let cents = self.0 % 1_000_000_000;
        if cents == 0 { format!("${}", self.0 / 1_000_000_000) } else { format!("${}", self.as_dollars()) }
    }

    fn json(&self) -> serde_json::Value {
        json!(self.as_dollars())
    }

    fn within(&self, min: &Self, max: &Self) -> bool {
        (min..=max).contains(&self)
    }
}

macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Value for $ty {
            const KIND: &'static str = "number";
            fn parse(raw: &Raw) -> Result<Self, String> {
                text(raw)?.replace('_', "").parse::<$ty>().map_err(|e| match e.kind() {
                    std::num::IntErrorKind::PosOverflow => {
                        format!("write a whole number up to {}", <$ty>::MAX)
                    }
                    _ => "write a whole number".to_string(),
                })
            }
            fn show(&self) -> String {
                self.to_string()
            }
            fn json(&self) -> serde_json::Value {
                json!(self)
            }
            fn within(&self, min: &Self, max: &Self) -> bool {
                (min..=max).contains(&self)
            }
        }
    )*};
}
integers!(u16, u32);

impl Value for f64 {
    const KIND: &'static str = "number";
    fn parse(raw: &Raw) -> Result<Self, String> {
        let number: Option<f64> = text(raw)?.parse().ok();
        number.filter(|n| n.is_finite()).ok_or_else(|| "write a number, such as 2 or 0.5".into())
    }
    fn show(&self) -> String {
        self.to_string()
    }
    fn json(&self) -> serde_json::Value {
        json!(self)
    }
    fn within(&self, min: &Self, max: &Self) -> bool {
        (min..=max).contains(&self)
    }
}

impl Value for IpAddr {
    const KIND: &'static str = "address";
    fn parse(raw: &Raw) -> Result<Self, String> {
        text(raw)?.parse().map_err(|_| "write a number such as 127.0.0.1, ::1 or 0.0.0.0".into())
    }
    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for bool {
    const KIND: &'static str = "true or false";
    fn parse(raw: &Raw) -> Result<Self, String> {
        match text(raw)?.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(true),
            "false" | "0" | "no" | "off" | "" => Ok(false),
            _ => Err("write true or false".into()),
        }
    }
    fn show(&self) -> String {
        self.to_string()
    }
    fn json(&self) -> serde_json::Value {
        json!(self)
    }
}

impl Value for String {
    const KIND: &'static str = "text";
    fn parse(raw: &Raw) -> Result<Self, String> {
        match raw {
            Raw::Text(t) if t.trim().is_empty() => Err("it is empty".into()),
            Raw::Text(t) => Ok(t.clone()),
            Raw::List(_) | Raw::Table(_) => text(raw).map(str::to_string),
        }
    }
    fn show(&self) -> String {
        self.clone()
    }
}

impl Value for PathBuf {
    const KIND: &'static str = "path";
    fn parse(raw: &Raw) -> Result<Self, String> {
        let t = text(raw)?;
        if t.is_empty() || t.contains('\0') { Err("write a path".into()) } else { Ok(PathBuf::from(t)) }
    }
    fn show(&self) -> String {
        self.display().to_string()
    }
}

impl Value for Vec<String> {
    const KIND: &'static str = "list";
    fn parse(raw: &Raw) -> Result<Self, String> {
        match raw {
            Raw::Text(t) => {
                Ok(t.split(',').map(|p| p.trim().to_string()).filter(|p| !p.is_empty()).collect())
            }
            Raw::List(l) => Ok(l.clone()),
            Raw::Table(_) => Err("write a list".into()),
        }
    }
    fn show(&self) -> String {
        self.join(",")
    }
    fn json(&self) -> serde_json::Value {
        json!(self)
    }
}

/// Names with values, such as the environment of a sandbox.
impl Value for BTreeMap<String, String> {
    const KIND: &'static str = "table";
    fn parse(raw: &Raw) -> Result<Self, String> {
        match raw {
            Raw::Table(t) => Ok(t.clone()),
            Raw::Text(t) if t.trim().is_empty() => Ok(BTreeMap::new()),
            Raw::Text(t) => pairs(t.split(',')),
            Raw::List(l) => pairs(l.iter().map(String::as_str)),
        }
    }
    fn show(&self) -> String {
        Raw::Table(self.clone()).show()
    }
    fn json(&self) -> serde_json::Value {
        json!(self)
    }
}

fn pairs<'a>(items: impl Iterator<Item = &'a str>) -> Result<BTreeMap<String, String>, String> {
    items
        .map(|item| match item.split_once('=') {
            Some((name, value)) if !name.trim().is_empty() => Ok((name.trim().into(), value.into())),
            Some(_) | None => Err(format!("write NAME=VALUE, not {item:?}")),
        })
        .collect()
}

/// Something that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(value: impl Into<String>) -> Self {
        Secret(value.into())
    }
    /// The secret itself: to be put into a request, nowhere else.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl Value for Secret {
    const KIND: &'static str = "secret";
    fn parse(raw: &Raw) -> Result<Self, String> {
        let t = text(raw)?;
        // A line break or a control character would end a header early.
        if t.is_empty() || t.chars().any(char::is_control) {
            return Err("it is empty or has control characters in it".into());
        }
        Ok(Secret(t.to_string()))
    }
    fn show(&self) -> String {
        "***".into()
    }
}

impl<T: Value> Value for Option<T> {
    const KIND: &'static str = T::KIND;
    fn unset() -> Option<Self> {
        Some(None)
    }
    fn parse(raw: &Raw) -> Result<Self, String> {
        T::parse(raw).map(Some)
    }
    fn show(&self) -> String {
        self.as_ref().map(T::show).unwrap_or_default()
    }
    fn json(&self) -> serde_json::Value {
        self.as_ref().map_or(serde_json::Value::Null, T::json)
    }
    fn within(&self, min: &Self, max: &Self) -> bool {
        match (self, min, max) {
            (Some(v), Some(min), Some(max)) => v.within(min, max),
            (None, _, _) | (_, None, _) | (_, _, None) => true,
        }
    }
}

/// A closed set of words.
macro_rules! choice {
    ($ty:ty { $($word:literal => $value:path),+ $(,)? }) => {
        impl $crate::settings::Value for $ty {
            const KIND: &'static str = $crate::settings::value::one_of!($($word),+);
            fn parse(raw: &$crate::settings::Raw) -> Result<Self, String> {
                match raw.show().trim() {
                    $($word => Ok($value),)+
                    _ => Err(format!("write {}", <$ty as $crate::settings::Value>::KIND)),
                }
            }
            fn show(&self) -> String {
                match self { $($value => $word,)+ }.to_string()
            }
        }
    };
}
macro_rules! one_of {
    ($first:literal $(, $rest:literal)*) => { concat!("`", $first, "`", $(" | `", $rest, "`"),*) };
}
pub(crate) use {choice, one_of};

#[cfg(test)]
mod tests {
    use super::*;

    fn parse<T: Value>(t: &str) -> Result<T, String> {
        T::parse(&Raw::Text(t.into()))
    }

    #[test]
    fn durations_sizes_and_money_read_as_people_write_them() {
        for (t, ms) in [
            ("90s", 90_000),
            ("2h", 7_200_000),
            ("1h30m", 5_400_000),
            ("1h 30m", 5_400_000),
            ("7200", 7_200_000),
            ("500ms", 500),
            ("1.5h", 5_400_000),
            ("1d", 86_400_000),
            ("0", 0),
        ] {
            assert_eq!(parse::<Millis>(t), Ok(Millis(ms)), "{t}");
            assert_eq!(parse::<Millis>(&Millis(ms).show()), Ok(Millis(ms)));
        }
        for (t, bytes) in
            [("4GiB", 4 << 30), ("4g", 4 << 30), ("1 GB", 1_000_000_000), ("512", 512), ("1.5k", 1536)]
        {
            assert_eq!(parse::<ByteSize>(t), Ok(ByteSize(bytes)), "{t}");
            assert_eq!(parse::<ByteSize>(&ByteSize(bytes).show()), Ok(ByteSize(bytes)));
        }
        for (t, cents) in [("$5", 500), ("5", 500), ("0.50", 50), ("5 USD", 500), ("$0", 0)] {
            assert_eq!(parse::<Usd>(t), Ok(Usd::cents(cents)), "{t}");
            assert_eq!(parse::<Usd>(&Usd::cents(cents).show()), Ok(Usd::cents(cents)));
        }
    }

    #[test]
    fn nonsense_is_refused_with_what_to_write() {
        for t in ["", "h", "2 parsecs", "-1s", "1e9s", "NaN", "2h3", "9999999999999d", "1..5s"] {
            let ok = parse::<Millis>(t);
            // A bare number after a unit counts as seconds; everything else is refused.
            assert!(ok.is_err() || t == "2h3", "{t}: {ok:?}");
        }
        for t in ["", "GiB", "4 XiB", "-4GiB", "inf", "99999999999TiB"] {
            assert!(parse::<ByteSize>(t).is_err(), "{t}");
        }
        for t in ["", "$", "-5", "$-5", "inf", "NaN", "1e3", "five", "10000000", "1.2.3"] {
            assert!(parse::<Usd>(t).is_err(), "{t}");
        }
        for t in ["", "1.5", "-1", "70000000000", "x"] {
            assert!(parse::<u32>(t).is_err(), "{t}");
        }
        assert!(parse::<bool>("maybe").is_err());
        assert!(parse::<Secret>("a\nb").is_err());
        assert!(u32::parse(&Raw::List(vec![])).is_err());
    }

    #[test]
    fn a_false_switch_is_false() {
        for t in ["false", "0", "no", "off", "False", ""] {
            assert_eq!(parse::<bool>(t), Ok(false), "{t}");
        }
    }

    #[test]
    fn secrets_are_never_shown() {
        let s = parse::<Secret>("hunter2").unwrap();
        assert_eq!((s.show(), format!("{s:?}"), s.expose()), ("***".into(), "***".into(), "hunter2"));
    }
}
