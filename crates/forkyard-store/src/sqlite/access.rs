use forkyard_core::Timestamp;
use rusqlite::types::Value as Sql;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};

use super::writer::Tx;
use crate::access::{FORGET_AT_ONCE, MAX_TOKENS, too_many_tokens};
use crate::codec::{corrupt, int, json, rows, uint};
use crate::{AuditEntry, AuditQuery, Deed, Result, Scope, StoreError, Token};

const COLUMNS: &str = "id, parent, name, scope, hash, created_at, expires_at, revoked_at";

pub(super) fn put_token(tx: &Tx<'_>, token: &Token) -> Result<()> {
    let now = int(token.created_at.0);
    tx.prepare_cached("DELETE FROM tokens WHERE parent IS NOT NULL AND expires_at < ?1")?.execute([now])?;
    let count: u32 = tx.prepare_cached("SELECT count(*) FROM tokens")?.query_row([], |r| r.get(0))?;
    if count as usize >= MAX_TOKENS {
        return Err(too_many_tokens());
    }
    let known: Option<i64> = tx
        .prepare_cached("SELECT 1 FROM tokens WHERE id = ?1")?
        .query_row([&token.id], |r| r.get(0))
        .optional()?;
    if known.is_some() {
        return Err(StoreError::Invalid(format!("there is a token {} already", token.id)));
    }
    tx.prepare_cached(
        "INSERT INTO tokens (id, parent, name, scope, hash, created_at, expires_at, revoked_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?
    .execute(params![
        token.id,
        token.parent,
        token.name,
        token.scope.as_str(),
        token.hash,
        now,
        token.expires_at.map(|t| int(t.0)),
        token.revoked_at.map(|t| int(t.0)),
    ])?;
    Ok(())
}

fn decode(r: &Row<'_>) -> rusqlite::Result<Result<Token>> {
    let time = |n: Option<i64>| n.map(|n| Timestamp(uint(n)));
    let scope: String = r.get(3)?;
    let Some(scope) = Scope::parse(&scope) else { return Ok(Err(corrupt("a token's scope", &scope))) };
    Ok(Ok(Token {
        id: r.get(0)?,
        parent: r.get(1)?,
        name: r.get(2)?,
        scope,
        hash: r.get(4)?,
        created_at: Timestamp(uint(r.get(5)?)),
        expires_at: time(r.get(6)?),
        revoked_at: time(r.get(7)?),
    }))
}

pub(super) fn token(conn: &Connection, id: &str) -> Result<Option<Token>> {
    conn.prepare_cached(&format!("SELECT {COLUMNS} FROM tokens WHERE id = ?1"))?
        .query_row([id], decode)
        .optional()?
        .transpose()
}

pub(super) fn tokens(conn: &Connection) -> Result<Vec<Token>> {
    let mut select = conn.prepare_cached(&format!("SELECT {COLUMNS} FROM tokens ORDER BY created_at, id"))?;
    select.query_map([], decode)?.map(|t| t?).collect()
}

pub(super) fn revoke_token(tx: &Tx<'_>, id: &str, at: Timestamp) -> Result<()> {
    let found = tx
        .prepare_cached("UPDATE tokens SET revoked_at = coalesce(revoked_at, ?2) WHERE id = ?1")?
        .execute(params![id, int(at.0)])?;
    if found == 0 {
        return Err(StoreError::NotFound { what: format!("token {id}") });
    }
    tx.prepare_cached("UPDATE tokens SET revoked_at = coalesce(revoked_at, ?2) WHERE parent = ?1")?
        .execute(params![id, int(at.0)])?;
    Ok(())
}

pub(super) fn forget_tokens(tx: &Tx<'_>, before: Timestamp) -> Result<u64> {
    let own = tx
        .prepare_cached("DELETE FROM tokens WHERE revoked_at < ?1 OR expires_at < ?1")?
        .execute([int(before.0)])?;
    let of_those = tx
        .prepare_cached(
            "DELETE FROM tokens WHERE parent IS NOT NULL AND parent NOT IN (SELECT id FROM tokens)",
        )?
        .execute([])?;
    Ok((own + of_those) as u64)
}

/// Ids grow with time: nobody has to look further than at the oldest.
pub(super) fn forget_deeds(tx: &Tx<'_>, before: Timestamp) -> Result<u64> {
    let gone = tx
        .prepare_cached(
            "DELETE FROM audit WHERE at < ?1 AND id IN (SELECT id FROM audit ORDER BY id LIMIT ?2)",
        )?
        .execute(params![int(before.0), FORGET_AT_ONCE as i64])?;
    Ok(gone as u64)
}

pub(super) fn put_audit(tx: &Tx<'_>, deed: &Deed, detail: &str) -> Result<u64> {
    tx.prepare_cached(
        "INSERT INTO audit (at, token, who, action, target, detail) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?
    .execute(params![int(deed.at.0), deed.token, deed.who, deed.action, deed.target, detail])?;
    Ok(uint(tx.last_insert_rowid()))
}

pub(super) fn audit(conn: &Connection, query: &AuditQuery) -> Result<Vec<AuditEntry>> {
    let mut sql = "SELECT id, at, token, who, action, target, detail FROM audit WHERE 1".to_string();
    let mut values = vec![Sql::Integer(rows(query.limit))];
    if let Some(before) = query.before {
        values.push(Sql::Integer(int(before)));
        sql.push_str(&format!(" AND id < ?{}", values.len()));
    }
    if let Some(target) = &query.target {
        values.push(Sql::Text(target.clone()));
        let n = values.len();
        // `0` follows `/`: all that begins with TARGET/.
        sql.push_str(&format!(" AND (target = ?{n} OR (target > ?{n} || '/' AND target < ?{n} || '0'))"));
    }
    sql.push_str(" ORDER BY id DESC LIMIT ?1");
    let mut select = conn.prepare_cached(&sql)?;
    let mut found = select.query(params_from_iter(values))?;
    let mut entries = Vec::new();
    while let Some(r) = found.next()? {
        let deed = Deed {
            at: Timestamp(uint(r.get(1)?)),
            token: r.get(2)?,
            who: r.get(3)?,
            action: r.get(4)?,
            target: r.get(5)?,
            detail: json("an action's detail", r.get_ref(6)?.as_str().map_err(rusqlite::Error::from)?)?,
        };
        entries.push(AuditEntry { id: uint(r.get(0)?), deed });
    }
    Ok(entries)
}
