//! The text side of a model: tokenizer, chat template, sampling wishes, and what the options make of them.
use crate::args::AnswerArgs;
use crate::report::Report;
use once_cell::unsync::OnceCell;
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::constraint::Grammars;
use q4_model::generate::Limits;
use q4_model::generation::GenerationConfig;
use q4_model::sampling::SamplingParams;
use q4_model::template::ChatTemplate;
use q4_model::text;
use q4_model::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::rc::Rc;

/// Cache positions are allocated in steps of this many.
const CONTEXT_STEP: usize = 64;

/// Tokenizer and sampling wishes of a model.
pub struct Text {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// `bos_token` and `eos_token`, for templates that print them.
    pub variables: Map<String, Value>,
    /// What compiles forms of answers for it.
    pub grammars: Grammars,
    generation: GenerationConfig,
    stop_ids: Vec<u32>,
    template: OnceCell<Rc<ChatTemplate>>,
}

impl Text {
    /// Reads the files beside the weights. [`Code::ModelMissing`] without a tokenizer.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let config = checkpoint.config();
        let tokenizer = text::tokenizer(checkpoint)?;
        let generation = text::generation(checkpoint)?;
        let mut stop_ids = generation.eos_token_ids.clone();
        if stop_ids.is_empty() {
            stop_ids = config.eos_token_ids.clone();
        }
        if stop_ids.is_empty() {
            stop_ids.extend(config.arch.template.ends.iter().filter_map(|t| tokenizer.id_of(t)));
        }
        let variables = text::variables(checkpoint)?;
        let grammars = Grammars::default();
        Ok(Self { tokenizer, variables, grammars, generation, stop_ids, template: OnceCell::new() })
    }

    /// The chat template of `checkpoint`, else that of its family's instruct models, which is said once.
    pub fn template(&self, checkpoint: &Checkpoint) -> Result<Rc<ChatTemplate>> {
        let read = || match text::template(checkpoint)? {
            Some(template) => Ok(Rc::new(template)),
            None => {
                let family = checkpoint.config().arch.template.family;
                tracing::warn!(
                    model = checkpoint.name(),
                    "no chat template: that of {family} instruct models is used; --raw takes a prompt as it is"
                );
                Ok(Rc::new(text::of_family(checkpoint)))
            }
        };
        self.template.get_or_try_init(read).cloned()
    }

    /// How the model wishes to be sampled.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// Ids that end an answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The model's wishes with the options over them. An option that can have no effect is warned about.
    pub fn sampling(&self, args: &AnswerArgs, report: &Report) -> Result<SamplingParams> {
        let seed = RandomState::new().build_hasher().finish() >> 32;
        let ignored = &self.generation.ignored;
        if !ignored.is_empty() {
            let names = ignored.join(", ");
            report.warn(&format!("generation_config.json asks for what q4 does not do: {names}"));
        }
        let params = args.wishes().over(&self.generation, seed)?;
        let filtered = args.top_p.is_some() || args.top_k.is_some() || args.min_p.is_some();
        if params.temperature == 0.0 && filtered {
            report.warn(
                "--top-p, --top-k and --min-p have no effect at temperature 0; --temperature 0.7 samples",
            );
        }
        Ok(params)
    }

    /// When an answer ends.
    pub fn limits(&self, args: &AnswerArgs) -> Limits {
        Limits {
            max_tokens: args.max_tokens.or(self.generation.max_new_tokens).unwrap_or(usize::MAX),
            stop_ids: if args.ignore_eos { Vec::new() } else { self.stop_ids.clone() },
            stop_strings: args.stop.clone(),
            ..Limits::default()
        }
    }
}

/// Positions of the cache: as asked, else `need` rounded up, never more than the model has.
pub fn context_size(asked: Option<u32>, need: usize, checkpoint: &Checkpoint) -> Result<usize> {
    let most = checkpoint.config().max_position_embeddings;
    let Some(asked) = asked else {
        return Ok(need.saturating_add(CONTEXT_STEP - 1) / CONTEXT_STEP * CONTEXT_STEP)
            .map(|n| n.clamp(1, most));
    };
    if asked as usize > most {
        return Err(Error::new(Code::Usage, format!("--context {asked}"))
            .need(format!("at most {most}, the model's max_position_embeddings")));
    }
    Ok(asked as usize)
}
