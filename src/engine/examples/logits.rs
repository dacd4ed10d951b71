//! Prints the logits of the token after some tokens as a JSON array, to compare with other
//! implementations: `logits FOLDER TOKEN...`.

use baton_engine::{Builtin, PoolSpec};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: logits FOLDER TOKEN...")?;
    let tokens = arguments.map(|token| token.parse()).collect::<Result<Vec<u32>, _>>()?;
    let blocks = u32::try_from(tokens.len().div_ceil(16).max(1))?;
    let pool = PoolSpec { blocks, ..PoolSpec::default() };
    let mut engine = Builtin::load(folder.as_ref(), pool)?;
    let logits = engine.logits(&tokens).map_err(|e| e.to_string())?;
    println!("{}", serde_json::to_string(&logits)?);
    Ok(())
}
