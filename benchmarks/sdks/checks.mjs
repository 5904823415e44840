// The server's address, the model's name, and the report of a script's checks.
export const [url, model] = process.argv.slice(2);
export const question = "Name one planet. Answer with one word.";

export async function report(checks) {
  const results = {};
  for (const [name, check] of Object.entries(checks)) {
    try {
      results[name] = Boolean(await check()) || "returned nothing";
    } catch (error) {
      results[name] = `${error.name}: ${error.message}`.slice(0, 400);
    }
  }
  console.log(JSON.stringify(results));
}
