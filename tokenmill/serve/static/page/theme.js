// Before the first paint, so that a chosen theme does not flash in the other one. Without a choice the system decides.
{
  const chosen = localStorage.getItem("tokenmill.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
