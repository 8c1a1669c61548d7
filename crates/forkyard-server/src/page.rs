//! Lists in pages: a cursor names the last thing that was seen, so that what is new or gone moves nothing.

use forkyard_core::{RunId, SandboxId, Timestamp};

use crate::error::{ApiError, Code, Result};

pub const DEFAULT_LIMIT: usize = 50;
pub const MAX_LIMIT: usize = 500;

pub fn limit(given: Option<u32>) -> Result<usize> {
    match given {
        None => Ok(DEFAULT_LIMIT),
        Some(n) if (1..=MAX_LIMIT as u32).contains(&n) => Ok(n as usize),
        Some(n) => {
            let fix = format!("give 1 to {MAX_LIMIT}");
            Err(ApiError::field("limit", n.to_string(), "is out of range", &fix))
        }
    }
}

fn wrong(text: &str) -> ApiError {
    let shown: String = text.chars().take(80).collect();
    ApiError::new(Code::BadRequest, format!("{shown:?} is not a cursor"))
        .hint("take `next_cursor` of the page before as it is")
}

pub fn run_cursor(at: Timestamp, run: &RunId) -> String {
    format!("{}-{run}", at.0)
}

pub fn read_run_cursor(text: &str) -> Result<(Timestamp, RunId)> {
    let (at, run) = text.split_once('-').ok_or_else(|| wrong(text))?;
    // Times are stored as signed numbers.
    let at: u64 = at.parse().ok().filter(|n| i64::try_from(*n).is_ok()).ok_or_else(|| wrong(text))?;
    Ok((Timestamp(at), RunId::new(run).map_err(|_| wrong(text))?))
}

pub fn sandbox_cursor(at: Timestamp, id: &SandboxId) -> String {
    format!("{}-{id}", at.0)
}

pub fn read_sandbox_cursor(text: &str) -> Result<(Timestamp, SandboxId)> {
    let (at, run) = read_run_cursor(text)?;
    Ok((at, SandboxId::new(run.as_str()).map_err(|_| wrong(text))?))
}

pub fn read_number_cursor(text: &str) -> Result<u64> {
    text.parse().map_err(|_| wrong(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_come_back_as_they_went_out() {
        let run = RunId::new("r1").unwrap();
        assert_eq!(read_run_cursor(&run_cursor(Timestamp(7), &run)).unwrap(), (Timestamp(7), run));
        for bad in ["", "7", "7-", "-r1", "x-r1", "7-R", "99999999999999999999-r1", "18446744073709551615-r"]
        {
            assert!(read_run_cursor(bad).is_err(), "{bad}");
        }
        assert!(limit(Some(0)).is_err() && limit(Some(501)).is_err() && limit(Some(500)).is_ok());
    }
}
