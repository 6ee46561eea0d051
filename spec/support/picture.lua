--- Writes a picture of a page of chromium.lua's to docs/NAME.webp, and says so.
return function(page, name)
  page:run "document.activeElement.blur()"
  local path = "docs/" .. name .. ".webp"
  local pipe = assert(io.popen("base64 --decode >" .. path, "w"))
  pipe:write(page:picture("webp", 90))
  pipe:close()
  local file = assert(io.open(path, "rb"))
  local size = file:seek "end"
  file:close()
  print(("%s: %d bytes"):format(path, size))
  assert(size > 0 and size < 60000, "not the right size for a page")
end
