//! What an answer must look like, where a request says so.
use crate::fields::Fields;
use crate::refusal::{Kind, Refusal};
use q4_model::constraint::{self, CallForm, Calls, MOST_CHOICES};
use q4_model::template::ChatTemplate;
use serde_json::Value;

/// What a request demands of its answers, and the field that does.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    /// Path of the field.
    pub at: String,
    /// What it demands.
    pub what: Demand,
}

/// What may be demanded.
#[derive(Clone, Debug, PartialEq)]
pub enum Demand {
    /// A form that every token of an answer must keep to.
    Form(constraint::Constraint),
    /// At least one call: of the named tool, else of any.
    Call(Option<String>),
}

impl Constraint {
    /// What the field `name` of `f` demands.
    pub fn of(f: &Fields, name: &str, what: Demand) -> Self {
        Self { at: f.path(name), what }
    }

    fn form(f: &Fields, name: &str, form: constraint::Constraint) -> Self {
        Self::of(f, name, Demand::Form(form))
    }

    /// OpenAI's `response_format`, or `text.format` of responses, whose schema lies one level higher.
    pub fn of_format(format: &Fields) -> Result<Option<Self>, Refusal> {
        match format.needed_text("type")? {
            "text" => Ok(None),
            "json_object" => Ok(Some(Self::form(format, "type", constraint::Constraint::JsonObject))),
            "json_schema" => {
                let inner = format.object("json_schema")?.unwrap_or_else(|| format.clone());
                let schema = inner.get("schema").ok_or_else(|| inner.wrong("schema", "a JSON schema"))?;
                Ok(Some(Self::form(&inner, "schema", constraint::Constraint::JsonSchema(schema.clone()))))
            }
            _ => Err(format.wrong("type", "text, json_object or json_schema")),
        }
    }

    /// The object `structured_outputs`, and the older fields `guided_...` beside the others: one of them.
    pub fn of_structure(f: &Fields) -> Result<Option<Self>, Refusal> {
        let mut found = None;
        let inner = f.object("structured_outputs")?;
        for name in ["json", "json_object", "regex", "choice", "grammar"] {
            if let Some(inner) = &inner {
                unite(&mut found, structure(inner, name, name)?)?;
            }
            unite(&mut found, structure(f, &format!("guided_{name}"), name)?)?;
        }
        if let Some(inner) = &inner {
            inner.neutral("structural_tag", |_| false)?;
        }
        Ok(found)
    }

    /// As the grammar's compiler takes it. `tools` are those that the model sees, and `several` says whether
    /// it may call more than one.
    pub fn over(
        &self,
        template: &ChatTemplate,
        tools: Option<&Value>,
        several: bool,
    ) -> constraint::Constraint {
        match &self.what {
            Demand::Form(form) => form.clone(),
            Demand::Call(named) => constraint::Constraint::Calls(Calls {
                tools: tools.cloned().unwrap_or_default(),
                named: named.clone(),
                several,
                form: CallForm::of(template),
            }),
        }
    }
}

/// One kind of structure, if the field `name` asks for it.
fn structure(f: &Fields, name: &str, kind: &str) -> Result<Option<Constraint>, Refusal> {
    let Some(value) = f.get(name) else { return Ok(None) };
    let form = match kind {
        "json" => constraint::Constraint::JsonSchema(match value {
            // Some clients send the schema as a text.
            Value::String(text) => serde_json::from_str(text).map_err(|_| f.wrong(name, "a JSON schema"))?,
            schema => schema.clone(),
        }),
        "json_object" => match f.flag(name)? {
            Some(true) => constraint::Constraint::JsonObject,
            _ => return Ok(None),
        },
        "regex" => constraint::Constraint::Regex(f.needed_text(name)?.to_owned()),
        "choice" => constraint::Constraint::Choice(f.texts(name, MOST_CHOICES)?),
        _ => constraint::Constraint::Grammar(f.needed_text(name)?.to_owned()),
    };
    Ok(Some(Constraint::form(f, name, form)))
}

/// Adds what another field demands.
///
/// # Errors
/// 400 where there is something already: nothing could keep to both.
pub fn unite(all: &mut Option<Constraint>, more: Option<Constraint>) -> Result<(), Refusal> {
    match (&all, more) {
        (_, None) => {}
        (None, more) => *all = more,
        (Some(first), Some(second)) => {
            let what = format!("{} and {}: an answer can keep to one of them", first.at, second.at);
            let refusal = Refusal::new(Kind::Invalid, what);
            return Err(Refusal { param: Some(second.at), ..refusal }.coded("contradiction"));
        }
    }
    Ok(())
}
