//! Values derived from the configuration: the class of a name, and the time limits of the stages.

use baton_legs::pairs::PairsConfig;
use baton_types::ClassId;

use crate::config::Config;

/// How long each stage of a request may take.
pub(crate) fn limits(config: &Config) -> PairsConfig {
    let (scheduler, service) = (&config.scheduler, &config.service);
    PairsConfig::new(&scheduler.classes, service.stage_slack, service.stage_floor_us)
}

/// The class of that name; the first one where none is named, or a tier of the API's that is no class here.
///
/// # Errors
/// In words: there is none.
pub(super) fn class_named(
    classes: &[baton_types::SloClass],
    wanted: Option<&str>,
) -> Result<ClassId, String> {
    let Some(name) = wanted else { return Ok(ClassId(0)) };
    match classes.iter().position(|class| *class.name == *name) {
        Some(at) => Ok(ClassId(u16::try_from(at).unwrap_or(0))),
        None if baton_router::API_TIERS.contains(&name) => Ok(ClassId(0)),
        None => {
            let known: Vec<&str> = classes.iter().map(|class| class.name.as_str()).collect();
            Err(format!("there is no service class '{name}'; there are: {}", known.join(", ")))
        }
    }
}
