//! `claims`: what is claimed on this host, and by whom.

use std::time::SystemTime;

use vm_passthrough::{claim, ledger};

use crate::api::{Body, ClaimState, ListedClaim};
use crate::cli::context::Context;
use crate::devices::saved;
use crate::failure::Failure;
use crate::text::describe;
use crate::text::table::Table;

/// Lists the claims of this host.
///
/// # Errors
/// When the ledger can't be read or the output can't be written.
pub(crate) fn run(context: &mut Context<'_>) -> Result<(), Failure> {
    let (mut claims, mut unreadable) = (Vec::new(), Vec::new());
    let mut saved = Vec::new();
    for claim in saved::all(&context.host).map_err(Failure::failed)? {
        claim.map_or_else(|error| unreadable.push(error), |claim| saved.push(claim));
    }
    for claim in ledger::claims(&context.host, claim::DEADLINE).map_err(Failure::failed)? {
        match claim {
            Ok(claim) => {
                let others = saved.len();
                saved.retain(|saved| saved.target != claim.entry.target);
                claims.push(ListedClaim::new(&claim, saved.len() < others));
            }
            Err(record) => unreadable.push(record.to_string()),
        }
    }
    claims.extend(saved.iter().map(ListedClaim::not_restored));
    for record in &unreadable {
        tracing::warn!("{record}");
    }
    let text = match claims.is_empty() && !unreadable.is_empty() {
        true => "no claim can be read; the ledger has records that can't be\n".into(),
        false => render(&claims, context.width),
    };
    context.print(|| Body::Claims { claims, unreadable }, || text)
}

fn render(claims: &[ListedClaim], width: Option<usize>) -> String {
    if claims.is_empty() {
        return "nothing is claimed\n".into();
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let mut table = Table::new(["ADDRESS", "FORMER DRIVER", "PERSIST", "AGE", "HELD BY"]);
    for claim in claims {
        // As they were taken, the function that was asked for comes last.
        for function in claim.functions.iter().rev() {
            let since = claim.owner.as_ref().and_then(|owner| owner.since);
            let age = since.map(|since| describe::age(now.saturating_sub(since)));
            let holder = if function.address == claim.address {
                holder(claim)
            } else {
                format!("with {}", claim.address)
            };
            let dash = || "-".to_owned();
            table.push([
                function.address.clone(),
                function.driver.clone().unwrap_or_else(dash),
                if claim.persist { "yes" } else { "no" }.into(),
                age.unwrap_or_else(dash),
                holder,
            ]);
        }
    }
    table.fit(width)
}

fn holder(claim: &ListedClaim) -> String {
    let user = claim.user.as_ref().filter(|_| claim.state == ClaimState::InUse);
    let Some(owner) = user.or(claim.owner.as_ref()) else {
        return "nobody, not claimed since the boot".into();
    };
    let process = format!("process {} ({})", owner.pid, owner.command);
    match (claim.state, &owner.guest) {
        (ClaimState::InUse, Some(guest)) => format!("guest {guest}, {process}"),
        (ClaimState::InUse, None) => process,
        (ClaimState::OwnerDied, _) => format!("{process}, which died"),
        (ClaimState::Unused | ClaimState::NotRestored, _) => "nobody, until released".into(),
    }
}
