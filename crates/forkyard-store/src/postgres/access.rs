use forkyard_core::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Postgres, QueryBuilder, Row};

use crate::access::{FORGET_AT_ONCE, MAX_TOKENS, too_many_tokens};
use crate::codec::{corrupt, int, json, rows, uint};
use crate::{AuditEntry, AuditQuery, Deed, Result, Scope, StoreError, Token};

const COLUMNS: &str = "SELECT id, parent, name, scope, hash, created_at, expires_at, revoked_at FROM tokens";

pub(super) async fn put_token(pool: &PgPool, token: &Token) -> Result<()> {
    let now = int(token.created_at.0);
    sqlx::query("DELETE FROM tokens WHERE parent IS NOT NULL AND expires_at < $1")
        .bind(now)
        .execute(pool)
        .await?;
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM tokens").fetch_one(pool).await?;
    if uint(count) >= MAX_TOKENS as u64 {
        return Err(too_many_tokens());
    }
    let made = sqlx::query(
        "INSERT INTO tokens (id, parent, name, scope, hash, created_at, expires_at, revoked_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO NOTHING",
    )
    .bind(&token.id)
    .bind(&token.parent)
    .bind(&token.name)
    .bind(token.scope.as_str())
    .bind(&token.hash)
    .bind(now)
    .bind(token.expires_at.map(|t| int(t.0)))
    .bind(token.revoked_at.map(|t| int(t.0)))
    .execute(pool)
    .await?;
    if made.rows_affected() == 0 {
        return Err(StoreError::Invalid(format!("there is a token {} already", token.id)));
    }
    Ok(())
}

fn decode(r: &PgRow) -> Result<Token> {
    let time = |n: Option<i64>| n.map(|n| Timestamp(uint(n)));
    let scope: String = r.try_get(3)?;
    Ok(Token {
        id: r.try_get(0)?,
        parent: r.try_get(1)?,
        name: r.try_get(2)?,
        scope: Scope::parse(&scope).ok_or_else(|| corrupt("a token's scope", &scope))?,
        hash: r.try_get(4)?,
        created_at: Timestamp(uint(r.try_get(5)?)),
        expires_at: time(r.try_get(6)?),
        revoked_at: time(r.try_get(7)?),
    })
}

pub(super) async fn token(pool: &PgPool, id: &str) -> Result<Option<Token>> {
    let mut sql = QueryBuilder::<Postgres>::new(COLUMNS);
    sql.push(" WHERE id = ").push_bind(id);
    sql.build().fetch_optional(pool).await?.map(|r| decode(&r)).transpose()
}

pub(super) async fn tokens(pool: &PgPool) -> Result<Vec<Token>> {
    let mut sql = QueryBuilder::<Postgres>::new(COLUMNS);
    sql.push(" ORDER BY created_at, id");
    sql.build().fetch_all(pool).await?.iter().map(decode).collect()
}

pub(super) async fn revoke_token(pool: &PgPool, id: &str, at: Timestamp) -> Result<()> {
    let found =
        sqlx::query("UPDATE tokens SET revoked_at = coalesce(revoked_at, $2) WHERE id = $1 OR parent = $1")
            .bind(id)
            .bind(int(at.0))
            .execute(pool)
            .await?;
    if found.rows_affected() == 0 {
        return Err(StoreError::NotFound { what: format!("token {id}") });
    }
    Ok(())
}

pub(super) async fn forget_tokens(pool: &PgPool, before: Timestamp) -> Result<u64> {
    let gone = sqlx::query(
        "WITH old AS (SELECT id FROM tokens WHERE revoked_at < $1 OR expires_at < $1)
         DELETE FROM tokens WHERE id IN (SELECT id FROM old) OR parent IN (SELECT id FROM old)",
    )
    .bind(int(before.0))
    .execute(pool)
    .await?;
    Ok(gone.rows_affected())
}

/// Ids grow with time: nobody has to look further than at the oldest.
pub(super) async fn forget_deeds(pool: &PgPool, before: Timestamp) -> Result<u64> {
    let gone =
        sqlx::query("DELETE FROM audit WHERE at < $1 AND id IN (SELECT id FROM audit ORDER BY id LIMIT $2)")
            .bind(int(before.0))
            .bind(FORGET_AT_ONCE as i64)
            .execute(pool)
            .await?;
    Ok(gone.rows_affected())
}

pub(super) async fn put_audit(pool: &PgPool, deed: &Deed, detail: &str) -> Result<u64> {
    let id: i64 = sqlx::query_scalar(
        "INSERT INTO audit (at, token, who, action, target, detail) VALUES ($1, $2, $3, $4, $5, $6) RETURNING id",
    )
    .bind(int(deed.at.0))
    .bind(&deed.token)
    .bind(&deed.who)
    .bind(&deed.action)
    .bind(&deed.target)
    .bind(detail)
    .fetch_one(pool)
    .await?;
    Ok(uint(id))
}

pub(super) async fn audit(pool: &PgPool, query: &AuditQuery) -> Result<Vec<AuditEntry>> {
    let mut sql = QueryBuilder::<Postgres>::new(
        "SELECT id, at, token, who, action, target, detail FROM audit WHERE true",
    );
    if let Some(before) = query.before {
        sql.push(" AND id < ").push_bind(int(before));
    }
    if let Some(target) = &query.target {
        // `0` follows `/`: all that begins with TARGET/.
        sql.push(" AND (target = ").push_bind(target.clone());
        sql.push(" OR (target > ").push_bind(format!("{target}/"));
        sql.push(" AND target < ").push_bind(format!("{target}0")).push("))");
    }
    sql.push(" ORDER BY id DESC LIMIT ").push_bind(rows(query.limit));
    let found = sql.build().fetch_all(pool).await?;
    found
        .iter()
        .map(|r| {
            let detail: String = r.try_get(6)?;
            let deed = Deed {
                at: Timestamp(uint(r.try_get(1)?)),
                token: r.try_get(2)?,
                who: r.try_get(3)?,
                action: r.try_get(4)?,
                target: r.try_get(5)?,
                detail: json("an action's detail", &detail)?,
            };
            Ok(AuditEntry { id: uint(r.try_get(0)?), deed })
        })
        .collect()
}
