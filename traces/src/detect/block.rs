//! How many tokens a block id stands for.

use crate::dialect::{Dialect, dynamo, weka};
use crate::error::{RowFault, Stage};
use crate::flat::FlatRow;
use crate::options::ReadOptions;

/// Rows that must agree before an unusual block size (or tails without ids) is believed: a few wrong
/// rows agree on something by chance.
pub(crate) const FEWEST_AGREEING_ROWS: usize = 8;

fn usual_block(dialect: Dialect) -> u32 {
    match dialect {
        Dialect::Bailian => 16,
        Dialect::Weka | Dialect::TraceLab => 64,
        _ => 512,
    }
}

/// Least and most, both included.
type Span = (u64, u64);

/// Block sizes for which every (ids, tokens) pair of a sample holds: `(counted, dropped)`, as
/// inclusive ranges, for tails that have an id and tails that have none.
pub(crate) fn implied_block(pairs: &[(u64, u64)]) -> (Option<Span>, Option<Span>) {
    let (mut counted, mut dropped) = ((1, u64::MAX), (1, u64::MAX));
    for &(ids, tokens) in pairs {
        if ids == 0 || tokens == 0 {
            continue;
        }
        let most = if ids == 1 { u64::MAX } else { tokens.div_ceil(ids - 1) - 1 };
        counted = (counted.0.max(tokens.div_ceil(ids)), counted.1.min(most));
        dropped = (dropped.0.max(tokens / (ids + 1) + 1), dropped.1.min(tokens / ids));
    }
    let some = |range: (u64, u64)| (range.0 <= range.1).then_some(range);
    (some(counted), some(dropped))
}

/// How many tokens a block id stands for, and whether tails have no id.
pub(super) fn block_of(
    dialect: Dialect,
    lines: &[&[u8]],
    rows: &[FlatRow],
    options: &ReadOptions,
    assumptions: &mut Vec<String>,
) -> Result<(u32, bool), RowFault> {
    let embedded = match dialect {
        Dialect::DynamoRequest => lines.iter().find_map(|line| dynamo::block_tokens(line)),
        Dialect::Weka => lines.iter().find_map(|line| weka::block_tokens(line)),
        _ => None,
    };
    let pairs: Vec<(u64, u64)> = rows.iter().filter_map(ids_and_tokens).collect();
    let told = options.block_tokens.map(|b| (b, "as told"));
    if let Some((block, why)) = told.or(embedded.map(|b| (b, "embedded in the rows"))) {
        if block == 0 {
            let remedy = "give a block size of at least 1";
            return Err(RowFault::new(Stage::Detect, "block-size", "a block of 0 tokens", remedy));
        }
        let (counted, dropped) = implied_block(&pairs);
        let enough = pairs.len() >= FEWEST_AGREEING_ROWS;
        let tails = dialect == Dialect::Weka || (enough && !within(counted, block) && within(dropped, block));
        assumptions.push(format!("blocks of {block} tokens ({why}){}", tails_text(tails)));
        return Ok((block, tails));
    }
    let without_ids = options.block_tokens_without_ids.filter(|_| pairs.is_empty());
    let (block, why, tails) = match without_ids.filter(|block| *block > 0) {
        Some(block) => (block, "as wanted; no ids to tell".to_owned(), dialect == Dialect::Weka),
        None => untold_block(dialect, &pairs),
    };
    assumptions.push(format!("blocks of {block} tokens ({why}){}", tails_text(tails)));
    Ok((block, tails))
}

/// Ids and tokens of a row that has ids.
fn ids_and_tokens(row: &FlatRow) -> Option<(u64, u64)> {
    let ids = row.hash_ids.as_ref()?.len() as u64;
    let tokens = u64::try_from(row.input_length?).ok()?;
    (ids > 0).then_some((ids, tokens))
}

/// The dialect's usual size, unless enough rows agree on another: size, why, and whether tails have
/// no id.
fn untold_block(dialect: Dialect, pairs: &[(u64, u64)]) -> (u32, String, bool) {
    let (usual, weka) = (usual_block(dialect), dialect == Dialect::Weka);
    let (counted, dropped) = implied_block(pairs);
    let kept = |why: &str| (usual, format!("usual for {dialect}; {why}"), weka);
    if pairs.is_empty() {
        return kept("no ids to tell");
    }
    if within(counted, usual) {
        return kept("ids and lengths agree");
    }
    if pairs.len() < FEWEST_AGREEING_ROWS {
        return kept("too few rows to imply another size");
    }
    if within(dropped, usual) {
        return (usual, format!("usual for {dialect}"), true);
    }
    for (range, tails) in [(counted, false), (dropped, true)] {
        if let Some(block) = range.and_then(power_of_two_in) {
            let why = format!("implied by ids and lengths; {dialect} usually has {usual}");
            return (block, why, tails);
        }
    }
    kept("ids and lengths do not agree with any one size")
}

fn within(range: Option<Span>, block: u32) -> bool {
    range.is_some_and(|(low, high)| (low..=high).contains(&u64::from(block)))
}

fn tails_text(dropped: bool) -> &'static str {
    if dropped { "; tails shorter than a block have no id and get one of their own" } else { "" }
}

fn power_of_two_in((low, high): (u64, u64)) -> Option<u32> {
    let block = low.checked_next_power_of_two()?;
    (block <= high).then(|| u32::try_from(block).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use crate::detect::settle;
    use crate::options::ReadOptions;

    #[test]
    fn the_block_size_follows_from_ids_and_lengths() {
        let row = |tokens: u64, ids: u64| {
            format!(
                "{{\"timestamp\":0,\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{:?}}}\n",
                (0..ids).collect::<Vec<_>>()
            )
        };
        let block = |text: String| {
            let setup = settle(text.as_bytes(), true, &ReadOptions::default()).unwrap().setup;
            (setup.block_tokens, setup.tails_dropped)
        };
        assert_eq!(block((row(600, 2) + &row(1025, 3)).repeat(4)), (512, false));
        assert_eq!(block((row(600, 1) + &row(1025, 2)).repeat(4)), (512, true));
        assert_eq!(block((row(100, 7) + &row(33, 3)).repeat(4)), (16, false));
        assert_eq!(block(row(600, 1) + &row(100, 7)), (512, false), "two rows are no evidence");
        // A size for files without ids is no word about files that have some.
        let wanting = ReadOptions { block_tokens_without_ids: Some(16), ..ReadOptions::default() };
        for (ids, expected) in [(0, 16), (2, 512)] {
            let settled = settle(row(600, ids).repeat(4).as_bytes(), true, &wanting).unwrap();
            assert_eq!(settled.setup.block_tokens, expected, "{ids} ids: {:?}", settled.assumptions);
        }
        assert_eq!(block((row(127, 1) + &row(260, 4)).repeat(4)), (64, true));
    }
}
